use super::*;

const METRICS: &str = include_str!("../../../../tests/vectors/vllm/metrics-main-after.txt");
const ENGINES: &str = include_str!("../../../../tests/vectors/vllm/engines.json");

fn captured(name: &str) -> serde_json::Value {
    let engines: serde_json::Value = serde_json::from_str(ENGINES).unwrap();
    engines[0][name].clone()
}

fn sources(value: serde_json::Value) -> BTreeMap<String, EventSource> {
    serde_json::from_value(value).unwrap()
}

#[test]
fn a_real_engine_tells_model_names_and_adapters() {
    let models = serde_json::from_value(captured("models")).unwrap();
    let facts = facts(&Config::default(), models, "0.32.0".into()).unwrap();
    assert_eq!(facts.engine_model, "./tiny-qwen3-vl");
    assert_eq!((facts.served_names, facts.lora_names), (vec!["tiny-vl".to_owned()], vec!["lora1".to_owned()]));
    assert_eq!(facts.max_model_len, 2048);
}

#[test]
fn a_real_engine_tells_its_event_endpoints_and_pool() {
    let found = ranks(&Config::default(), &sources(captured("kv_event_sources")), METRICS);
    let source = Source {
        endpoint: "tcp://127.0.0.1:18231".into(),
        replay: Some("tcp://127.0.0.1:18331".into()),
        topic: "kv@127.0.0.1:18131@tiny-vl".into(),
        bind: false,
    };
    let rank = Rank { rank: 0, source: Some(source), block_size: 32, capacity_blocks: 400, kv_usage_permille: 0 };
    assert_eq!(found, [rank]);
}

#[test]
fn ranks_of_all_pages_are_joined() {
    let sources = sources(serde_json::json!({
        "0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:1"},
        "1": {"enable_kv_cache_events": false, "endpoint": "tcp://*:2"},
        "x": {},
    }));
    let page = "vllm:kv_cache_usage_perc{engine=\"2\"} 0.25\n";
    let found = ranks(&Config::default(), &sources, page);
    assert_eq!(
        found.iter().map(|rank| (rank.rank, rank.source.is_some())).collect::<Vec<_>>(),
        [(0, true), (1, false), (2, false)]
    );
    assert_eq!(found[2].kv_usage_permille, 250);
}

#[test]
fn config_overrules_what_the_engine_says() {
    let mut config = Config::default();
    config.events.endpoint = "tcp://10.0.0.9:6000".into();
    config.events.replay_endpoint = "tcp://10.0.0.9:7000".into();
    config.events.topic = "kv".into();
    config.model.block_size = 16;
    config.model.engine_model = "org/model".into();
    let page = "vllm:kv_cache_usage_perc{engine=\"1\"} 1\n";
    let found = ranks(&config, &BTreeMap::new(), page);
    let source = found[1].source.as_ref().unwrap();
    assert_eq!(
        (source.endpoint.as_str(), source.replay.as_deref()),
        ("tcp://10.0.0.9:6001", Some("tcp://10.0.0.9:7001"))
    );
    assert_eq!((source.topic.as_str(), found[1].block_size), ("kv", 16));
    let models = Models { data: vec![Model { id: "m".into(), root: None, parent: None, max_model_len: None }] };
    assert_eq!(facts(&config, models, String::new()).unwrap().engine_model, "org/model");
}

#[test]
fn an_engine_without_model_string_is_an_error() {
    let models = Models { data: vec![Model { id: "m".into(), root: None, parent: None, max_model_len: None }] };
    assert!(matches!(facts(&Config::default(), models, String::new()), Err(DiscoverError::NoModel)));
}
