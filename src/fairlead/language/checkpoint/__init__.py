"""What a checkpoint says of its model: files, configuration, architecture, families."""
