"""`--ratio auto`: speeds of this machine, and the controller that decides by them."""
