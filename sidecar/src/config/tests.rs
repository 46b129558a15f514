use super::*;

fn parse(text: &str) -> Result<Config, String> {
    fovea_service::config::parse(text, "sidecar.yaml").map_err(|error| error.to_string())
}

#[track_caller]
fn refused(text: &str, part: &str) {
    let error = parse(text).expect_err(text);
    assert!(error.contains(part), "{part:?} is not in: {error}");
}

#[test]
fn an_empty_file_gives_the_defaults() {
    let config = parse("").unwrap();
    assert_eq!(config.listen, "0.0.0.0:8000".parse().unwrap());
    assert_eq!(config.admin, "127.0.0.1:8001".parse().unwrap());
    assert_eq!(config.engine.url, "http://127.0.0.1:8200");
    assert_eq!(config.limits.body_max, ByteSize::mib(64));
    assert_eq!(config.gossip.heartbeat, Duration::from_millis(250));
    assert!(!config.trust.loopback && config.trust.key().unwrap().is_none());
}

#[test]
fn the_committed_example_is_valid() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/sidecar.yaml")).unwrap();
    let config = parse(&text).unwrap();
    assert_eq!(config.balancers, ["127.0.0.1:7400"]);
}

#[test]
fn values_that_cannot_work_are_named() {
    for (text, part) in [
        ("engine: {url: 'ftp://a'}", "engine.url"),
        ("engine: {url: 'http://a/v1'}", "engine.url"),
        ("engine: {url: 'http://user@a:1'}", "engine.url"),
        ("advertised_url: 10.0.0.7", "advertised_url"),
        ("balancers: [balancer]", "balancers"),
        ("balancers: ['kubernetes://ml']", "names no Kubernetes service"),
        ("advertised_url: 'https://10.0.0.7:1'", "is no base url of http"),
        ("tls: {cert_file: a, key_file: b}\nadvertised_url: 'http://10.0.0.7:1'", "is no base url of https"),
        ("tls: {cert_file: a, key_file: b, client_auth: required}", "tls.ca_file"),
        ("gossip: {tls: {ca_file: a, cert_file: b}}", "gossip.tls.key_file"),
        ("events: {bind: true}", "events.endpoint"),
        ("allow_paths: [sleep]", "allow_paths"),
        ("limits: {body_max: 1GiB}", "limits.body_max"),
        ("limits: {preamble_max: 0B}", "limits.preamble_max"),
        ("timeouts: {first_byte: 0s}", "time of 0"),
        ("gossip: {ring_max: 0B}", "ring_max"),
        ("blocks: {blocks_max: 0}", "blocks_max"),
        ("log: {filter: 'a=loud'}", "log.filter"),
        ("lissen: 1", "lissen"),
    ] {
        refused(text, part);
    }
}

#[test]
fn a_printed_config_holds_no_secret() {
    let config = parse("trust: {shared_key: hunter2}\ngossip: {tls: {ca_file: ca.pem}}").unwrap();
    let shown = format!("{config:?} {config:#?}");
    assert!(!shown.contains("hunter2") && shown.contains("ca.pem"), "{shown}");
}
