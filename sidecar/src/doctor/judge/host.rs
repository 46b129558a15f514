//! What surrounds engine and sidecar: open ports, clocks, limits.

use crate::doctor::check::Verdict;
use crate::doctor::evidence::{Evidence, Skew};

/// Seconds that clocks may differ.
const SKEW_MAX: i64 = 2;
/// Files besides connections: sockets to balancers and engine events, logs, the runtime.
const FILES_BESIDES: u64 = 128;
/// Bytes of a text token in a JSON body, generously.
const BYTES_PER_TOKEN: u64 = 8;

pub fn dangerous_endpoints(evidence: &Evidence<'_>) -> Verdict {
    let (open, family) = (&evidence.open, evidence.family);
    let passed = evidence.config.allow_paths.iter().find(|path| family.forbidden.contains(&path.as_str()));
    if let Some(path) = passed {
        return Verdict::bad(
            format!("allow_paths passes {path} to clients"),
            format!("take {path} out of allow_paths in sidecar.yaml"),
        );
    }
    if !open.answered {
        return Verdict::unknown("the engine did not answer when asked for them");
    }
    let found = open.dangers.join("; ");
    match (open.dangers.is_empty(), &open.outside) {
        (true, _) => Verdict::good("none found"),
        (false, None) => Verdict::good(format!("{found}; on loopback only, and the sidecar passes none of it")),
        (false, Some(address)) => Verdict::bad(
            format!("{found}; the sidecar passes none of it, but the engine itself answers at {address}"),
            "let the engine listen on loopback (--host 127.0.0.1), or admit only the sidecar to its port; and switch off what is not needed",
        ),
    }
}

pub fn clock(evidence: &Evidence<'_>) -> Verdict {
    match evidence.skew {
        None => Verdict::unknown("the engine's answers have no date"),
        Some(Skew(least, most)) if least > SKEW_MAX || most < -SKEW_MAX => Verdict::bad(
            format!(
                "the engine's clock is {} s {} ours",
                least.abs().min(most.abs()),
                if least > 0 { "ahead of" } else { "behind" }
            ),
            "let both hosts follow one time server",
        ),
        Some(_) => Verdict::good(format!("within {SKEW_MAX} s of ours")),
    }
}

pub fn limits(evidence: &Evidence<'_>) -> Verdict {
    let (limits, facts) = (&evidence.config.limits, &evidence.found.facts);
    // A client's connection and the engine's for it.
    let files = 2 * limits.connections_max as u64 + FILES_BESIDES;
    if let Some(most) = evidence.files_max.filter(|&most| most < files) {
        return Verdict::bad(
            format!("{most} open files allowed, {files} needed for limits.connections_max {}", limits.connections_max),
            format!(
                "start the sidecar with ulimit -n {files} (systemd: LimitNOFILE={files}), or lower limits.connections_max"
            ),
        );
    }
    let body = BYTES_PER_TOKEN * u64::from(facts.max_model_len);
    if limits.body_max.as_u64() < body {
        return Verdict::bad(
            format!(
                "limits.body_max is {}, but a prompt of {} tokens may have {body} bytes",
                limits.body_max, facts.max_model_len
            ),
            format!("set limits.body_max: {body}B or more"),
        );
    }
    for rank in &evidence.found.ranks {
        let tokens = u64::from(rank.block_size.max(evidence.config.blocks.tokens_min));
        let blocks = rank.capacity_tokens / tokens.max(1);
        let most = evidence.config.blocks.blocks_max as u64;
        if blocks > most {
            return Verdict::bad(
                format!("rank {} holds {blocks} blocks of {tokens} tokens, {most} are remembered", rank.rank),
                format!("set blocks.blocks_max: {blocks} or more in sidecar.yaml"),
            );
        }
    }
    let files = evidence.files_max.map_or("open files not told".to_owned(), |most| format!("{most} open files"));
    Verdict::good(format!("{files}, {} connections, bodies of {}", limits.connections_max, limits.body_max))
}
