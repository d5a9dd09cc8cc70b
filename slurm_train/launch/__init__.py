"""From a configuration to a job: plan, sbatch text, run directory, submission, local launch. No torch."""
