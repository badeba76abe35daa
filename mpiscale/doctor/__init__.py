"""`mpiscale doctor`: will it run here, and how well; what to do where not."""
