//! SGLang: pages and command line as read in 0.5.9 to 0.5.23; events measured for 0.5.16, .19, .21, .22 and .23. No server was run.

use std::time::Duration;

use serde_json::Value;

use super::ask::Ask;
use super::family::{Danger, Family, There, Told, Trap, Traps};
use crate::engine::version::Version;

/// Limit of one page.
const PAGE: Duration = Duration::from_secs(3);

pub const FAMILY: Family = Family {
    name: "SGLang",
    known: |version| match version {
        Version(0, 5, 16 | 19 | 21 | 22 | 23) => Ok("its events were measured"),
        Version(0, 5, 9..=23) => Ok("its events were read, not measured"),
        _ => Err("0.5.9 to 0.5.23 were read, events of 0.5.16, .19, .21, .22 and .23 measured"),
    },
    traps,
    events_on: "start sglang with --kv-events-config '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\",\"topic\":\"kv\"}'",
    replay_on: "add \"replay_endpoint\":\"tcp://*:5558\" to --kv-events-config",
    bind_on: "write \"endpoint\":\"tcp://*:5557\" in --kv-events-config (from 0.5.22 on \"bind\":true does it too)",
    caching_on: "start sglang without --disable-radix-cache",
    usage_on: "start sglang with --enable-cache-report",
    block_size: "set model.block_size in sidecar.yaml to --page-size",
    hashes: "events carry tokens, pads included: hashes are opaque names",
    dangers: &[
        Danger { path: "/flush_cache", there: There::Always, what: "/flush_cache empties the cache" },
        Danger {
            path: "/release_memory_occupation",
            there: There::Always,
            what: "/release_memory_occupation frees the weights",
        },
        Danger {
            path: "/update_weights_from_disk",
            there: There::Always,
            what: "/update_weights_from_disk changes the model",
        },
        Danger { path: "/abort_request", there: There::Always, what: "/abort_request ends other clients' requests" },
    ],
    forbidden: &["/flush_cache", "/release_memory_occupation", "/update_weights_from_disk", "/abort_request"],
};

fn traps(at: &Traps<'_>) -> Vec<Trap> {
    let mut traps = Vec::new();
    let Some(version) = at.version else { return traps };
    let stale_pads = matches!(at.told.model_type.as_str(), "qwen3_vl" | "qwen3_vl_moe" | "");
    if version >= Version(0, 5, 20) && stale_pads {
        let what = "from 0.5.20 on mm_hashes on /generate end the scheduler of qwen3_vl and qwen3_vl_moe (sgl-project/sglang#40225)";
        traps.push(if at.config.allow_paths.iter().any(|path| path == "/generate") {
            Trap::fault(format!("{what}, and allow_paths passes /generate"), "take /generate out of allow_paths")
        } else {
            Trap::note(format!("{what}; Fovea never sends them, and the sidecar passes no /generate"))
        });
    }
    if version < Version(0, 5, 18) {
        traps.push(Trap::note("up to 0.5.17 events hide cache salts: salted prompts read as plain ones"));
    }
    if version < Version(0, 5, 23) {
        traps.push(Trap::note(
            "up to 0.5.22 events in default format hide LoRA adapters: their blocks read as the base model's",
        ));
    }
    if version < Version(0, 5, 20) {
        traps.push(Trap::note(
            "before 0.5.20 events carry no session: of equal texts in flight with different images none is learnt",
        ));
    }
    traps
}

pub async fn told(ask: &Ask, version: Option<Version>) -> Told {
    let pages = ask.pages(PAGE);
    let mut found = [Value::Null, Value::Null];
    for (value, names) in
        found.iter_mut().zip([["/server_info", "/get_server_info"], ["/model_info", "/get_model_info"]])
    {
        for name in names {
            if value.is_null() {
                *value = pages.optional::<Value>(name).await.ok().flatten().unwrap_or(Value::Null);
            }
        }
    }
    let [server, model] = found;
    of_pages(&server, &model, version)
}

fn of_pages(server: &Value, model: &Value, version: Option<Version>) -> Told {
    let flag = |value: &Value, name| value.get(name).and_then(Value::as_bool);
    let line = server.get("kv_events_config").and_then(Value::as_str);
    let line = line.and_then(|text| serde_json::from_str::<Value>(text).ok()).unwrap_or(Value::Null);
    let zmq = line.get("publisher").and_then(Value::as_str) == Some("zmq");
    let endpoint = line.get("endpoint").and_then(Value::as_str).unwrap_or("tcp://*:5557");
    let dynamo = line.get("format").and_then(Value::as_str) == Some("dynamo");
    let sessions = version.is_some_and(|version| version >= Version(0, 5, 20));
    Told {
        tells_events: !server.is_null(),
        endpoints: if zmq { vec![(0, endpoint.to_owned())] } else { Vec::new() },
        forced_bind: flag(&line, "bind") == Some(true),
        buffer_steps: line.get("buffer_steps").and_then(Value::as_u64),
        prefix_caching: flag(server, "disable_radix_cache").map(|off| !off),
        hashes: zmq.then(|| {
            let format = if dynamo { "dynamo format: names tell namespaces apart" } else { "default format" };
            format!("{format}; {}", FAMILY.hashes)
        }),
        usage: flag(server, "enable_cache_report"),
        takes_images: flag(model, "has_image_understanding"),
        model_type: model.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned(),
        sessions: sessions && flag(server, "enable_session_radix_cache") != Some(true),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Config;

    #[test]
    fn pages_are_read_and_may_be_missing() {
        let server = json!({"disable_radix_cache": true, "enable_cache_report": false,
            "kv_events_config": r#"{"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557","bind":true}"#});
        let model = json!({"model_type": "qwen3_vl", "has_image_understanding": true});
        let told = of_pages(&server, &model, Some(Version(0, 5, 22)));
        assert_eq!(told.endpoints, [(0, "tcp://127.0.0.1:5557".to_owned())]);
        assert_eq!((told.prefix_caching, told.usage, told.takes_images), (Some(false), Some(false), Some(true)));
        assert!(told.forced_bind && told.sessions && told.tells_events);
        let session = json!({"enable_session_radix_cache": true});
        assert!(!of_pages(&session, &Value::Null, Some(Version(0, 5, 22))).sessions);
        assert_eq!(of_pages(&Value::Null, &Value::Null, None), Told::default());
    }

    #[test]
    fn generate_is_a_fault_only_where_it_is_passed_to_a_model_that_dies() {
        let check = |version, model_type: &str, allow: &[&str]| {
            let config = Config { allow_paths: allow.iter().map(ToString::to_string).collect(), ..Config::default() };
            let told = Told { model_type: model_type.into(), ..Told::default() };
            let traps = traps(&Traps { version: Some(version), told: &told, config: &config });
            traps.iter().any(|trap| trap.remedy.is_some())
        };
        assert!(check(Version(0, 5, 20), "qwen3_vl", &["/generate"]));
        assert!(!check(Version(0, 5, 20), "qwen3_vl", &[]));
        assert!(!check(Version(0, 5, 19), "qwen3_vl", &["/generate"]));
        assert!(!check(Version(0, 5, 23), "gemma3", &["/generate"]));
    }
}
