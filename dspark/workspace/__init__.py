"""The workspace: find it, resolve a build in it, check the machine, run DVC as a child process, collect results."""
