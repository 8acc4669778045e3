"""The server's entrypoint: ``python -m vllm.entrypoints.openai.api_server``."""

from __future__ import annotations

import os
import sys
import time

from fake_scenario import FaultKind

from vllm.engine.arg_utils import EngineArgs
from vllm.front_end import leave_with, start_engine
from vllm.http_server import Handler, Server, serve
from vllm.launch_config import Launch, configure
from vllm.launch_record import record_start, scenario
from vllm.processes import begin, obey_signals
from vllm.requests import Service
from vllm.speech import Speech
from vllm.strike import strike
from vllm.utils.argparse_utils import FlexibleArgumentParser


def make_arg_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """The server's flags and the engine's."""
    parser.add_argument("--host", default=None)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--disable-uvicorn-access-log", action="store_true")
    EngineArgs.add_cli_args(parser)
    return parser


def _bind(launch: Launch) -> Server:
    if launch.fault(FaultKind.PORT_TAKEN):
        raise OSError(98, f"Address already in use: ('127.0.0.1', {launch.args.port})")
    server = Server((launch.args.host or "127.0.0.1", launch.args.port), Handler)
    keys = (launch.args.api_key, os.environ.get("VLLM_API_KEY"))
    server.keys = tuple(key for key in keys if key)
    server.models = tuple(launch.args.served_model_name or [launch.args.model])
    return server


def main() -> None:
    """Serve, or fail as the scenario's version fails."""
    number = record_start("serve")
    begin(number, "front")
    played = scenario()
    speech = Speech(played, "APIServer" if played.release >= (0, 10, 1) else "")
    args = make_arg_parser(FlexibleArgumentParser(prog="api_server.py")).parse_args()
    speech.info(f"vLLM API server version {played.version}", "api_server.py:1272")
    try:
        launch = configure(EngineArgs(args), number, speech)
        obey_signals(launch.faults)
        binds_early = played.release >= (0, 8, 0)
        server = _bind(launch) if binds_early else None
        engine = start_engine(launch, speech, serving=True, closes=(server.socket,) if server else ())
        obey_signals(launch.faults, engine.end)
        time.sleep(played.stage_seconds.get("ready", 0))
        strike(launch.faults, "ready", None, launch.max_num_seqs, speech, number)
        server = server or _bind(launch)
    except Exception as error:
        leave_with(error, speech)
        return
    server.service = Service(launch, engine, speech)
    speech.info(f"Starting vLLM server on http://127.0.0.1:{launch.args.port}", "entry.py:139")
    serve(server)


if __name__ == "__main__":
    sys.stdout.flush()
    main()
