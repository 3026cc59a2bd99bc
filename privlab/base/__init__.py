"""What every room needs and knows nothing of privacy: errors, options, plug-ins, draws, files, precision."""
