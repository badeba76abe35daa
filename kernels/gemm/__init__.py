"""A matrix product C = A B written for the cache: five loops around a micro-kernel.

Arithmetic is cheap and memory is far, so a product is cut until what is used again and
again lies in the nearest memory. C's rows are contiguous here; seen from BLIS, which
thinks in columns, A and B have changed places.

    5th loop  rows i of C, HEIGHT at a time     A^T [HEIGHT, DEPTH] packed: in L3
    4th loop    k, DEPTH at a time
    3rd loop      columns j of C, WIDTH at      B [DEPTH, WIDTH] packed: half of L2
                  a time
    2nd loop        strips of A's rows          A [TILE_ROWS, DEPTH]: in L1
    1st loop          panels of B's columns     C [TILE_ROWS, 16 to 48]: in registers
    micro-kernel        p = 0, 1, ... DEPTH     a row of a panel, a column of a strip

                               j ──>  WIDTH
                        ┌──────┬──┬──┬──┬──────┐
                        │      │  │  │  │      │  DEPTH: a block of B, cut
               B [k, n] │      │  │  │  │      │  into packed panels
                        ├──────┴──┴──┴──┴──────┤
                        │                      │
                        └──────────────────────┘
         DEPTH
        ┌─────┬──────┐  ┌──────┬──┬──┬──┬──────┐
     i  │     │      │  │      │  │  │  │      │
     │  ├─────┤      │  │      ├──┼──┼──┤      │
     v  │strip│      │  │      │  │▒▒│  │      │  ▒▒: a tile of C, in registers while
        ├─────┤      │  │      ├──┼──┼──┤      │  the micro-kernel runs down k
        │     │      │  │      │  │  │  │      │
        └─────┴──────┘  └──────┴──┴──┴──┴──────┘
         A [m, k]        C [m, n]

register_tile.py   how large the tile is on this CPU
micro_kernel.py    the innermost loop
packing.py         blocks of B, and of A^T, in the order in which they are read
gemm.py            the five loops, and how threads share C
product.py         the public name: which arrays take this way, and which NumPy's
vector_ir.py, views.py   what the intrinsics are made of

Sources: K. Goto, R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
ACM TOMS 34(3), 2008; F. Van Zee, R. van de Geijn, "BLIS: A Framework for Rapidly
Instantiating BLAS Functionality", ACM TOMS 41(3), 2015.
"""
