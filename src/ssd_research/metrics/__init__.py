"""Measurements of generated images: pure functions of stored detections, answers or features."""
