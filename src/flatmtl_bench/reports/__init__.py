"""Reports: tables, findings and pages, made from run folders and nothing else."""
