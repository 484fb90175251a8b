"""Tars of samples: webdataset and img2dataset."""
