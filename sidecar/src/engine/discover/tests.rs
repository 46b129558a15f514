use super::vllm::EventSource;
use super::*;

const METRICS: &str = include_str!("../../../../tests/vectors/vllm/metrics-main-after.txt");
const ENGINES: &str = include_str!("../../../../tests/vectors/vllm/engines.json");

fn captured(name: &str) -> serde_json::Value {
    let engines: serde_json::Value = serde_json::from_str(ENGINES).unwrap();
    engines[0][name].clone()
}

fn sources(value: serde_json::Value) -> std::collections::BTreeMap<String, EventSource> {
    serde_json::from_value(value).unwrap()
}

fn models(owner: Option<&str>) -> Models {
    serde_json::from_value(serde_json::json!({"data": [{"id": "m", "owned_by": owner}]})).unwrap()
}

fn link(rank: &Rank) -> &ZmqLink {
    match rank.source.as_ref().unwrap() {
        Source::Zmq(link) => link,
        Source::Pull(_) => panic!("zmq expected"),
    }
}

#[test]
fn a_real_engine_tells_model_names_and_adapters() {
    let models: Models = serde_json::from_value(captured("models")).unwrap();
    assert_eq!(models.kind(), EngineKind::Vllm);
    let facts = facts(&Config::default(), EngineKind::Vllm, models, Told::default()).unwrap();
    assert_eq!(facts.engine_model, "./tiny-qwen3-vl");
    assert_eq!((facts.served_names, facts.lora_names), (vec!["tiny-vl".to_owned()], vec!["lora1".to_owned()]));
    assert_eq!((facts.max_model_len, facts.exif), (2048, true));
}

#[test]
fn a_real_engine_tells_its_event_endpoints_and_pool() {
    let found = vllm::ranks("127.0.0.1", &sources(captured("kv_event_sources")), METRICS);
    let source = ZmqLink {
        endpoint: "tcp://127.0.0.1:18231".into(),
        replay: Some("tcp://127.0.0.1:18331".into()),
        topic: "kv@127.0.0.1:18131@tiny-vl".into(),
        bind: false,
        wire: Wire::Vllm,
    };
    let source = Some(Source::Zmq(source));
    assert_eq!(found, [Rank { rank: 0, source, block_size: 32, capacity_tokens: 12_800, kv_usage_permille: 0 }]);
}

#[test]
fn ranks_of_all_pages_are_joined() {
    let sources = sources(serde_json::json!({
        "0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:1"},
        "1": {"enable_kv_cache_events": false, "endpoint": "tcp://*:2"},
        "x": {},
    }));
    let page = "vllm:kv_cache_usage_perc{engine=\"2\"} 0.25\n";
    let found = vllm::ranks("h", &sources, page);
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
    config.model.capacity_blocks = 10;
    config.model.engine_model = "org/model".into();
    config.model.exif = Some(true);
    let found = overruled(&config, EngineKind::Sglang, Rank { rank: 1, ..Rank::default() });
    let source = link(&found);
    assert_eq!(
        (source.endpoint.as_str(), source.replay.as_deref()),
        ("tcp://10.0.0.9:6001", Some("tcp://10.0.0.9:7001"))
    );
    assert_eq!((source.topic.as_str(), source.wire), ("kv", Wire::Sglang));
    assert_eq!((found.block_size, found.capacity_tokens), (16, 160));
    let facts = facts(&config, EngineKind::Sglang, models(None), Told::default()).unwrap();
    assert_eq!((facts.engine_model.as_str(), facts.exif), ("org/model", true));
}

#[test]
fn a_pulled_engine_with_an_endpoint_is_pushed_from() {
    let mut config = Config::default();
    config.events.endpoint = "tcp://*:5557".into();
    let media = Media { placeholder: Some(9), vocab_size: None };
    let pulled = Rank { source: Some(Source::Pull(media)), ..Rank::default() };
    assert_eq!(link(&overruled(&config, EngineKind::TrtLlm, pulled)).wire, Wire::TrtLlm(media));
}

#[test]
fn an_engine_without_model_string_is_an_error() {
    let result = facts(&Config::default(), EngineKind::Vllm, models(None), Told::default());
    assert!(matches!(result, Err(DiscoverError::NoModel)));
}

#[test]
fn engines_name_their_family_as_owner_of_their_models() {
    for (owner, expect) in [
        (Some("vllm"), EngineKind::Vllm),
        (Some("sglang"), EngineKind::Sglang),
        (Some("tensorrt_llm"), EngineKind::TrtLlm),
        (Some("someone"), EngineKind::Vllm),
        (None, EngineKind::Vllm),
    ] {
        assert_eq!(models(owner).kind(), expect, "{owner:?}");
    }
}

#[test]
fn sglang_tells_ports_from_which_each_rank_counts_on() {
    let info = serde_json::from_value(serde_json::json!({
        "version": "0.5.23", "model_path": "/m", "page_size": 4,
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
            "replay_endpoint_port_base": 5600, "topic": "kv", "block_size": 8, "dp_size": 2},
    }));
    let mut found = sglang::ranks("10.0.0.7", &info.unwrap());
    assert_eq!(found.len(), 2);
    let second = link(&found[1]);
    assert_eq!(
        (second.endpoint.as_str(), second.replay.as_deref()),
        ("tcp://10.0.0.7:5558", Some("tcp://10.0.0.7:5601"))
    );
    assert_eq!((second.topic.as_str(), found[1].block_size, second.wire), ("kv", 8, Wire::Sglang));
    let loads = serde_json::json!({"loads": [{"dp_rank": 1, "max_total_num_tokens": 640, "token_usage": 0.5}]});
    sglang::loaded(&mut found, &loads);
    assert_eq!((found[1].capacity_tokens, found[1].kv_usage_permille, found[0].capacity_tokens), (640, 500, 0));
}

#[test]
fn sglang_on_this_host_tells_the_addresses_it_bound() {
    let page = serde_json::json!({
        "local_kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://127.0.0.1:7001", "topic": "", "block_size": 1,
            "replay_endpoint": "tcp://127.0.0.1:7002"}],
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557},
    });
    let endpoint =
        |host: &str| link(&sglang::ranks(host, &serde_json::from_value(page.clone()).unwrap())[0]).endpoint.clone();
    assert_eq!(endpoint("127.0.0.1"), "tcp://127.0.0.1:7001");
    assert_eq!(endpoint("10.0.0.7"), "tcp://10.0.0.7:5557");
}

#[test]
fn older_sglang_tells_its_command_line_and_connects_without_a_wildcard() {
    let source = |endpoint: &str| {
        let config = serde_json::json!({"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": "tcp://*:5558"});
        let info = serde_json::json!({"page_size": 1, "dp_size": 1, "kv_events_config": config.to_string()});
        sglang::ranks("10.0.0.7", &serde_json::from_value(info).unwrap())[0].source.clone()
    };
    assert!(matches!(source("tcp://*:5557"), Some(Source::Zmq(link)) if link.endpoint == "tcp://10.0.0.7:5557"));
    assert_eq!(source("tcp://127.0.0.1:5557"), None);
}

#[test]
fn trtllm_tells_its_pool_by_prometheus_and_its_media_by_the_models_config() {
    let page =
        "trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 100\ntrtllm_kv_cache_utilization 0.25\n";
    let media =
        Media::of_config(&serde_json::json!({"image_token_id": 151_655, "text_config": {"vocab_size": 152_000}}));
    assert_eq!(media, Media { placeholder: Some(151_655), vocab_size: Some(152_000) });
    let found = trtllm::rank(media, page);
    assert_eq!((found.block_size, found.capacity_tokens, found.kv_usage_permille), (32, 3200, 250));
    assert_eq!(found.source, Some(Source::Pull(media)));
}
