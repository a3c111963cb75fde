"""What the papers claim: a folder of parts for each script beside this folder that measures a claim."""
