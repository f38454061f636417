"""A process that shares as an engine does: a Cluster as JSON is its argument; a line of JSON in, a line out."""

import json
import sys

import numpy as np

from sam.sharing.client import Client
from sam.sharing.drafter import SharingDrafter
from sam.sharing.relay import RelayTransport
from sam.sharing.shard import Cluster


def main() -> None:
    cluster = Cluster(*json.loads(sys.argv[1]))
    drafter = SharingDrafter(max_draft_tokens=3)
    drafter.warm_up()
    client = Client(lambda: RelayTransport(cluster), cluster.run_id, cluster.shards, 0.02)
    drafter.share(client)
    client.start()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        what, request, tokens = json.loads(line)
        if what == "start":
            drafter.start(request, np.array(tokens, np.int32))
            answer = None
        elif what == "step":
            text = np.array(tokens, np.int32)
            answer = drafter.step([request], text, np.array([0, len(text)]), np.array([3])).token_ids.tolist()
        elif what == "stop":
            answer = client.stop()
        else:
            answer = drafter.counters
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
