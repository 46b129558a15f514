use super::*;

/// The error of a config text, or "ok".
#[track_caller]
fn check(text: &str, expect: &str) {
    let got = match fovea_service::config::parse::<BalancerConfig>(text, "balancer.yaml") {
        Ok(_) => "ok".to_owned(),
        Err(error) => error.to_string(),
    };
    assert!(got.contains(expect), "{got}");
}

#[test]
fn nothing_written_is_a_working_config() {
    check("", "ok");
}

#[test]
fn a_typo_is_an_error_with_its_line() {
    check("mode: load\nlisten_on: 0.0.0.0:1\n", "balancer.yaml:2:");
}

#[test]
fn values_that_cannot_work_name_their_field() {
    check("limits: {body_max: 1GiB}", "limits.bodies_max: is smaller than body_max");
    check("models: [{name: m, dir: a}, {name: m, dir: b}]", "models[1].name: `m` stands twice");
    check("freshness: {stale_after: 9s}", "freshness.excluded_after");
    check("choose: {guard_factor: 0.5}", "choose.guard_factor: is 0.5");
    check("choose: {work_weight: -1}", "choose.work_weight: is -1");
    check("choose: {tier_weights: [0.5, 0.8, 0.5]}", "choose.tier_weights: is [0.5, 0.8, 0.5]");
    check("choose: {tier_weights: [1, .nan, 0]}", "choose.tier_weights");
    check("choose: {tier_weights: [1, 0.9]}", "balancer.yaml:1:");
    check("health: {failures_max: 65}", "health.failures_max: is more");
    check("quarantine: {ttl: 0s}", "quarantine.ttl: is 0");
    check("queue: {status: 500}", "queue.status: is neither");
    check("history: {ttl: 1ms}", "history.ttl: is shorter");
    check("history: {blocks_max: 0}", "history.blocks_max: is 0");
    check("mode: approximate", "ok");
    check("workers: [{url: http://e1:8000, models: [m], engine: sglang, capacity_blocks: 9, mode: load}]", "ok");
    check("workers: [{url: e1:8000}]", "workers[0].url: `e1:8000` is not of the form");
    check("workers: [{url: http://e1:1}, {url: http://e1:1/}]", "workers[1].url: `http://e1:1/` stands twice");
    check("workers: [{url: http://e1:1, block_size: 0}]", "workers[0].block_size: is 0");
    check("models: [{name: m}]\nmodels_from_workers: true", "ok");
    check("limits: {index_entries_max: 0}", "limits.index_entries_max: is 0");
    check("media: {bytes_max: 1MiB}", "media.bytes_max: leaves no room beside the cache");
    check("render: {per_minute: 0}", "render.per_minute: is 0");
    check("media: {timeout: 0s}", "media.timeout: is 0");
    check("sync_tls: {cert_file: a}", "key_file");
    check("sync_tls: {cert_file: a, key_file: b, client_auth: required}", "sync_tls.ca_file: is missing");
    check("sidecar_tls: {ca_file: a, key_file: b}", "sidecar_tls.cert_file: is missing");
    check("media: {allow: [10.0.0.1]}", "balancer.yaml:1:");
}

#[test]
fn a_printed_config_holds_no_secret() {
    let text = "trust: {shared_key: hunter2}\ntls: {cert_file: a.pem, key_file: a.key}";
    let config: BalancerConfig = fovea_service::config::parse(text, "balancer.yaml").unwrap();
    let shown = format!("{config:?} {config:#?}");
    assert!(!shown.contains("hunter2") && shown.contains("a.key"), "{shown}");
}

#[test]
fn the_example_for_operators_is_valid() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/balancer.yaml");
    check(&std::fs::read_to_string(path).unwrap(), "ok");
}
