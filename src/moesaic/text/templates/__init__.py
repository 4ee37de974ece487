"""Chat templates, compiled and rendered in processes of their own with limits on time, memory and length."""
