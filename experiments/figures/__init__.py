"""The figures of studies, drawn from their records."""
