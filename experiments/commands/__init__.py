"""The commands of studies, and `privlab evaluate`, which the command line finds here."""
