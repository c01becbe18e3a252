"""A trained model leaves the harness: measured again, asked about pictures, written for others to load."""
