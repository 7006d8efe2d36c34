// Load Video (VeoStyle): a preview that follows trim, rate and size, and the clip's facts, before anything is queued.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

const NODE = "VeoStyleLoadVideo";
const SETTLED = 400;
const HEIGHT = 220;
const SUPERSEDED = 409;
const SETTINGS = ["file", "start", "duration", "force_rate", "every_nth", "frame_cap", "width", "height", "fit", "path"];

function settingsOf(node) {
  const linked = new Set((node.inputs ?? []).filter((i) => i.link != null).map((i) => i.widget?.name ?? i.name));
  if (SETTINGS.some((name) => linked.has(name))) return null;
  return Object.fromEntries(SETTINGS.map((name) => [name, node.widgets.find((w) => w.name === name)?.value]));
}

async function ask(route, node, settings) {
  // A newer request of the same node ends the older on the server.
  const asked = { asker: `${api.clientId} ${node.graph?.id ?? ""} ${node.id}`, settings };
  const answer = await api.fetchApi(`/veostyle/${route}`, { method: "POST", body: JSON.stringify(asked) });
  if (answer.status === SUPERSEDED) return null;
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

function cutsInWords({ cuts, frames, seconds, whole }) {
  const span = whole ? "" : ` in the first ${seconds.toFixed(0)} s`;
  const places = cuts.slice(0, 8).map((c) => `${c.toFixed(2)} s`);
  const listed = places.length ? `: ${places.join(", ")}${cuts.length > 8 ? ", ..." : ""}` : "";
  return `${whole ? `${frames} frames, ` : ""}${cuts.length} cut${cuts.length === 1 ? "" : "s"}${span}${listed}`;
}

function addPreview(node) {
  const box = document.createElement("div");
  box.style.cssText = "display:flex;flex-direction:column;gap:4px;overflow:hidden;width:100%;height:100%";
  const video = Object.assign(document.createElement("video"), { muted: true, loop: true, autoplay: true, controls: true });
  video.style.cssText = "width:100%;flex:1;min-height:0;object-fit:contain;background:#000";
  const facts = document.createElement("div");
  facts.style.cssText = "font:11px sans-serif;line-height:1.35;white-space:pre-wrap;color:var(--input-text,#ddd)";
  box.append(video, facts);
  const widget = node.addDOMWidget("veostyle_preview", "veostyle_preview", box, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => HEIGHT,
  });
  widget.serialize = false;

  node.hideOutputImages = true;
  // The editor adds a preview of the whole file for uploads; two would tell two different things.
  const addDOMWidget = node.addDOMWidget;
  node.addDOMWidget = function (name, ...rest) {
    const added = addDOMWidget.call(this, name, ...rest);
    if (name === "video-preview") {
      added.hidden = true;
      // The editor sets a size again whenever a file is loaded.
      Object.defineProperty(added, "computeLayoutSize", { get: () => () => ({ minHeight: 0, minWidth: 0 }), set() {} });
      added.element.querySelectorAll?.("video").forEach((v) => v.pause());
    }
    return added;
  };

  let shown = "";
  const show = (text, file, failed) => {
    if (file) video.src = api.apiURL(`/view?${new URLSearchParams({ filename: file, type: "temp" })}`);
    else {
      video.removeAttribute("src");
      video.load();
    }
    video.style.visibility = file ? "visible" : "hidden";
    facts.style.color = failed ? "var(--error-text,#f66)" : "";
    facts.textContent = text;
  };
  const refresh = async () => {
    // A node that is being copied belongs to no graph.
    if (!node.graph) return;
    const settings = settingsOf(node);
    if (!settings || (!settings.file && !settings.path)) {
      shown = "";
      show("", null, false);
      return;
    }
    const wanted = JSON.stringify(settings);
    if (wanted === shown) return;
    shown = wanted;
    try {
      const previewed = await ask("preview", node, settings);
      if (!previewed || shown !== wanted) return;
      show(previewed.facts, previewed.file, false);
      const cuts = await ask("cuts", node, settings);
      if (cuts && shown === wanted) facts.textContent = `${previewed.facts}\n${cutsInWords(cuts)}`;
    } catch (error) {
      if (shown !== wanted) return;
      // The same settings may do later, once the file is there.
      shown = "";
      show(error.message, null, true);
    }
  };

  let timer;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, SETTLED);
  };
  for (const name of SETTINGS) {
    const setting = node.widgets.find((w) => w.name === name);
    if (!setting) continue;
    const before = setting.callback;
    setting.callback = function (...args) {
      const result = before?.apply(this, args);
      // Another video may have been uploaded under the same name.
      if (name === "file") shown = "";
      later();
      return result;
    };
  }
  const configured = node.onConfigure;
  node.onConfigure = function (...args) {
    configured?.apply(this, args);
    later();
  };
  const connected = node.onConnectionsChange;
  node.onConnectionsChange = function (...args) {
    const result = connected?.apply(this, args);
    later();
    return result;
  };
  const removed = node.onRemoved;
  node.onRemoved = function (...args) {
    clearTimeout(timer);
    shown = "removed";
    video.pause();
    removed?.apply(this, args);
  };
  later();
}

app.registerExtension({
  name: "VeoStyle.LoadVideo",
  nodeCreated(node) {
    if (node.comfyClass === NODE) addPreview(node);
  },
});
