"""Commands of the engines a run can use besides the native one, and what wraps them (containers, Nsight)."""
