"""A decode step as one CUDA graph whose kernels ask expert servers through mailboxes."""
