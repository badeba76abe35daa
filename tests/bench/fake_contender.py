"""A contender that trains nothing: it notes what it is asked, and answers at once.

python fake_contender.py NAME LOG [--loss X] [--dies | --sleeps]
"""

import argparse
import json
import sys
import time
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("log")
parser.add_argument("--loss", type=float, default=5.0)
parser.add_argument("--seconds", type=float, default=1.0)
parser.add_argument("--dies", action="store_true")
parser.add_argument("--sleeps", action="store_true")
asked = parser.parse_args()

reply: Any
for line in sys.stdin:
    message = json.loads(line)
    with open(asked.log, "a") as log:
        log.write(f"{asked.name} {message['do']} {message.get('number', '')}\n")
    took = {"wall_s": asked.seconds, "cpu_s": asked.seconds / 2}
    if message["do"] == "build":
        reply = {"name": asked.name, "details": ["made up"], "before_bytes": 100}
    elif message["do"] == "step":
        if asked.dies:
            sys.exit("no memory left")
        if asked.sleeps:
            time.sleep(60)
        reply = {"loss": asked.loss, **took, "idle_cpu_s": 0.0, "peak_bytes": 2**30}
    elif message["do"] == "memory":
        reply = None
    else:
        reply = {"wall_s": 0.02, "cpu_s": 0.02}
    print(json.dumps(reply), flush=True)
