"""Using a trained network: the classes of images, and export to other formats.

classifier.py is a checkpoint that is ready to classify, and predict.py feeds it images. export.py writes it in the
formats of export_formats.py, and compares the logits of what it wrote with its own.
"""
