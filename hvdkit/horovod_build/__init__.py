"""Makes Horovod 0.28.1 installable on current frameworks: which edits it needs, and the builder."""
