"""What policies of speculation make of whole answers at several loads, on a simulated device."""
