"""Worker processes: user code in a process of its own, which can be limited, watched and killed."""
