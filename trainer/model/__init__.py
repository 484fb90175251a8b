"""The encoder, its objectives, its optimizer, and the collectives between ranks."""
