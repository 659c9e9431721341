"""Words only: what goes over the wire, what is stored, settings, refusals; imports nothing above itself."""
