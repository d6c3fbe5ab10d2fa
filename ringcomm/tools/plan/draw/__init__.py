"""`ringcomm plan draw`: who has what after each round of messages, as a picture and as a page.

story    runs the plans on names instead of numbers: which rank's contribution is where
frames   the SVG of the state after each round
page     one HTML page with a slider
command  the arguments
"""
