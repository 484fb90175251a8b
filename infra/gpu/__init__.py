"""One command for a GPU machine: does it agree with the CPU, how fast is it, and what does a training there reach."""
