"""Operations by kind.

In each kind <op>.py has the reference, <op>_triton.py its kernels, <op>_autograd.py the autograd function.
"""
