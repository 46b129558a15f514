use std::path::Path;

use fovea_balancer_core::choose;
use fovea_balancer_core::fleet::Freshness;
use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::config::render::RenderConfig;
use crate::prepare::ClientUuid;
use crate::workers::{PoolFacts, Workers};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");

/// One model of one pool without workers.
struct World {
    workers: Arc<Workers>,
    pool: PoolRef,
    base_names: Arc<[String]>,
    preparer: Arc<Preparer>,
    metrics: RenderMetrics,
}

impl World {
    fn new() -> Self {
        let workers = Arc::new(Workers::new(Freshness::default(), choose::Settings::default(), 1000));
        let engine = EngineFacts {
            kind: EngineKind::Vllm,
            version: String::new(),
            engine_model: "/model".to_owned(),
            served_names: Vec::new(),
            lora_names: Vec::new(),
            max_model_len: 0,
            exif: true,
            hash_scheme: HashScheme::Fovea1,
            hybrid: false,
        };
        Self {
            pool: workers.new_pool(PoolFacts::new(&engine, 16)),
            workers,
            base_names: vec!["m".to_owned()].into(),
            preparer: Arc::new(Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap()),
            metrics: RenderMetrics::register(&mut Registry::default()),
        }
    }

    fn asker(&self, enabled: bool) -> Option<(Asker, Renderer)> {
        let config = RenderConfig { enabled, ..RenderConfig::default() };
        Asker::new(
            &config,
            Arc::clone(&self.workers),
            self.metrics.clone(),
            crate::secure::Access::default(),
            std::time::Duration::from_secs(1),
        )
    }

    fn known<'a>(&'a self, renderer: Option<&'a Renderer>) -> Known<'a> {
        Known { pool: &self.pool, base_names: &self.base_names, preparer: &self.preparer, renderer }
    }

    fn entries(&self) -> usize {
        self.pool.rendered.0.len()
    }
}

#[tokio::test]
async fn a_size_is_queued_once_and_a_full_queue_forgets_it() {
    let world = World::new();
    let (asker, renderer) = world.asker(true).unwrap();
    let known = world.known(Some(&renderer));
    for _ in 0..3 {
        assert_eq!(known.rendering(448, 320), None);
    }
    assert_eq!((world.entries(), asker.waiting()), (1, 1));
    for width in 1..1000 {
        assert_eq!(known.rendering(width, 1), None);
    }
    assert_eq!((world.entries(), asker.waiting(), world.metrics.dropped.get()), (QUEUE_MAX, QUEUE_MAX, 1000 - 256));
    // No worker serves the model: what was queued may be asked again.
    drop(renderer);
    asker.run(CancellationToken::new()).await;
    assert_eq!(world.entries(), 0);
}

#[tokio::test]
async fn what_no_probe_should_show_is_not_queued() {
    let world = World::new();
    assert!(world.asker(false).is_none());
    let (asker, renderer) = world.asker(true).unwrap();
    assert_eq!(world.known(None).rendering(448, 320), None);
    for (width, height) in [(0, 1), (1, 0), (u32::MAX, u32::MAX), (8193, 8192)] {
        assert_eq!(world.known(Some(&renderer)).rendering(width, height), None);
    }
    assert_eq!((world.entries(), asker.waiting()), (0, 0));
}

#[tokio::test]
async fn equal_sizes_of_two_models_are_two() {
    let world = World::new();
    let (asker, renderer) = world.asker(true).unwrap();
    let other: Arc<[String]> = vec!["n".to_owned()].into();
    world.known(Some(&renderer)).rendering(448, 320);
    Known { base_names: &other, ..world.known(Some(&renderer)) }.rendering(448, 320);
    assert_eq!(asker.waiting(), 2);
    let size = Size { model: model(&world.base_names), width: 448, height: 320 };
    let shown = Arc::new(Rendering::new(&[9], &[9; 140]).unwrap());
    world.pool.rendered.0.insert(size, Entry::Known(Arc::clone(&shown)));
    assert_eq!(world.known(Some(&renderer)).rendering(448, 320), Some(shown));
    assert_eq!(Known { base_names: &other, ..world.known(Some(&renderer)) }.rendering(448, 320), None);
}

#[test]
fn sizes_are_bounded_by_their_number_and_their_runs() {
    let check = |rendering: Rendering, most: usize| {
        let (store, rendering) = (Store::default(), Arc::new(rendering));
        for width in 1..20_000 {
            store.0.insert(Size { model: 0, width, height: 1 }, Entry::Known(Arc::clone(&rendering)));
        }
        assert!((most / 2..=most).contains(&store.0.len()), "{}", store.0.len());
    };
    let rows: Vec<u32> = (0..4000).collect();
    check(Rendering::new(&[9], &rows).unwrap(), 262);
    check(Rendering::new(&[9], &[9; 140]).unwrap(), 4096);
}
