//! ZMQ endpoints as vLLM writes them, made reachable from here.
//!
//! vLLM 0.32 `distributed/kv_events.py`: the engine binds an endpoint with `*` or `::`, or one of `ipc://`; rank r uses port + r.

/// Replaces a bind-all host (`*`, `0.0.0.0`, `[::]`) by the engine's own; anything else stays.
pub fn reachable(endpoint: &str, engine_host: &str) -> String {
    let Some((host, port)) = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')) else {
        return endpoint.to_owned();
    };
    match host {
        "*" | "0.0.0.0" | "[::]" | "::" => format!("tcp://{engine_host}:{port}"),
        _ => endpoint.to_owned(),
    }
}

/// The endpoint of a data-parallel rank, given rank 0's. Port 0 and other transports are left alone.
pub fn for_rank(endpoint: &str, rank: u32) -> String {
    let Some((head, port)) = endpoint.strip_prefix("tcp://").and_then(|rest| rest.rsplit_once(':')) else {
        return endpoint.to_owned();
    };
    match port.parse::<u16>() {
        Ok(base) if base > 0 => format!("tcp://{head}:{}", u32::from(base).saturating_add(rank)),
        _ => endpoint.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bind_all_hosts_become_the_engines() {
        for (endpoint, expect) in [
            ("tcp://*:5557", "tcp://10.0.0.7:5557"),
            ("tcp://0.0.0.0:1", "tcp://10.0.0.7:1"),
            ("tcp://[::]:1", "tcp://10.0.0.7:1"),
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
            ("ipc:///tmp/kv", "ipc:///tmp/kv"),
            ("tcp://*", "tcp://*"),
            ("", ""),
        ] {
            assert_eq!(reachable(endpoint, "10.0.0.7"), expect);
        }
    }

    #[test]
    fn a_rank_adds_to_the_port() {
        for (endpoint, expect) in [
            ("tcp://*:5557", "tcp://*:5559"),
            ("tcp://*:0", "tcp://*:0"),
            ("tcp://a:65535", "tcp://a:65537"),
            ("ipc://x", "ipc://x"),
        ] {
            assert_eq!(for_rank(endpoint, 2), expect);
        }
    }
}
