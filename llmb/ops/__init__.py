"""Operations by kind; in each kind <op>.py holds the reference, <op>_triton.py the kernels, <op>_autograd.py the autograd function."""
