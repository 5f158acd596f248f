"""Every span, attribute and metric by name, and the code that records them."""
