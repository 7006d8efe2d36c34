"""Triton kernels, each beside the PyTorch code that computes the same; one public function a file picks between them."""
