"""What several rooms need and users do not: files, tasks, threads, text, machines."""
