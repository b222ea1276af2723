"""Parts of accuracy.py, serving_accuracy.py and native_accuracy.py: fits, rankings, pictures."""
