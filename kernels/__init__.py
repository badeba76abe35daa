"""Kernels: each file begins with its NumPy reference, then the compiled version.

The public name of a kernel picks one of the two (`choose.py`); both take and give
plain arrays and know nothing of tensors, ranks or graphs.
"""

if __name__ == "kernels":
    raise ImportError(
        "got `import kernels`, expected `import mpiscale.kernels`: under two names "
        "every kernel would exist twice; write `from mpiscale.kernels.softmax import "
        "softmax`"
    )
