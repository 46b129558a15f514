//! An engine without a model, for tests and the demo: of the shape of vLLM, SGLang or TensorRT-LLM.
//!
//! True block accounting by the engine's own rules (hashes, hits, eviction, events), true prompts (template, tokenizer,
//! placeholder expansion, image identity), made-up text, and time by a simple model. **Invariant:** imports no Fovea
//! crate, so that what both sides agree on has been worked out twice.

pub mod blocks;
pub mod cache;
pub mod config;
pub mod engine;
pub mod events;
pub mod fault;
pub mod hash;
mod http;
pub mod image;
pub mod prompt;
pub mod publisher;
pub mod scheduler;
pub mod sglang;
pub mod tree;
pub mod trtllm;

pub use config::{ConfigError, EngineKind, SimConfig};
pub use engine::{NoSuchRank, Sources, State};
pub use fault::Fault;

use engine::{Engine, Rank};
use publisher::{Changes, Command, Options, Published, Publisher};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use trtllm::pull::{Filler, Queue};

/// Batches between the scheduler and the publisher; the scheduler waits when they are not taken.
const COMMANDS_MAX: usize = 1024;

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting cannot work.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model directory cannot be used.
    #[error(transparent)]
    Model(#[from] prompt::LoadError),
    /// The HTTP address cannot be bound.
    #[error("cannot bind the HTTP address")]
    Bind(#[source] std::io::Error),
    /// An event address cannot be bound.
    #[error("cannot bind an event address")]
    BindEvents(#[source] zeromq::ZmqError),
}

/// One running engine. Dropping it stops it in the background; [`Sim::stop`] waits.
pub struct Sim {
    /// Address of the HTTP server.
    pub http: SocketAddr,
    /// Address of rank 0's event socket, `tcp://…`; empty where events are polled.
    pub events: String,
    /// Address of rank 0's replay socket, `tcp://…`.
    pub replay: String,
    /// Event sockets of all ranks.
    pub sources: Vec<Sources>,
    engine: Arc<Engine>,
    tasks: TaskTracker,
}

impl Sim {
    /// Loads the model, binds all sockets and starts.
    ///
    /// # Errors
    /// Names the setting, file or address at fault.
    pub async fn start(config: SimConfig) -> Result<Self, StartError> {
        config.validate()?;
        let config = Arc::new(config);
        let model = Arc::new(prompt::Model::load(&config.model_dir)?);
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await.map_err(StartError::Bind)?;
        let http = listener.local_addr().map_err(StartError::Bind)?;
        let topic = config.topic.clone().unwrap_or_else(|| match config.engine_kind {
            EngineKind::Vllm => format!("kv@{http}@{}", config.model_name),
            EngineKind::Sglang | EngineKind::Trtllm => String::new(),
        });
        let changes = Changes::default();
        let published: Vec<_> = (0..config.data_parallel_size)
            .map(|_| Arc::new(Published { changes: changes.clone(), ..Published::default() }))
            .collect();
        let pull = Arc::new(Queue::new(config.buffer_steps, config.max_model_len));
        let outlets = match config.engine_kind {
            EngineKind::Trtllm => Outlet::polled(&pull, &published),
            _ => Outlet::published(&config, topic, &published).await.map_err(StartError::BindEvents)?,
        };
        let (mut ranks, mut work) = (Vec::new(), Vec::new());
        for (index, ((outlet, sources), published)) in outlets.into_iter().zip(published).enumerate() {
            let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
            let (config, model) = (Arc::clone(&config), Arc::clone(&model));
            ranks.push(Arc::new(Rank::new(index, config, model, published, commands, sources)));
            work.push((outlet, inbox));
        }
        let sources: Vec<_> = ranks.iter().map(|rank| rank.sources.clone()).collect();
        let engine = Arc::new(Engine::new(config, model, ranks, pull, changes));
        let tasks = TaskTracker::new();
        for (rank, (outlet, inbox)) in engine.ranks.iter().zip(work) {
            tasks.spawn(Arc::clone(rank).run(engine.stop.clone()));
            tasks.spawn(engine.stop.clone().run_until_cancelled_owned(outlet.run(inbox)));
        }
        tasks.spawn(http::serve(listener, Arc::clone(&engine)));
        tasks.close();
        let Sources { events, replay, .. } = sources[0].clone();
        Ok(Self { http, events, replay, sources, engine, tasks })
    }

    /// The state at this moment.
    pub fn state(&self) -> State {
        self.engine.state()
    }

    /// Waits until the state is as asked and returns it.
    pub async fn wait_for(&self, reached: impl Fn(&State) -> bool) -> State {
        self.engine.wait_for(reached).await
    }

    /// Switches a fault on, in all ranks.
    pub async fn fault(&self, fault: Fault) {
        let _ = self.engine.fault(fault, None).await;
    }

    /// Switches a fault on in one rank.
    ///
    /// # Errors
    /// There is no such rank.
    pub async fn fault_in(&self, rank: usize, fault: Fault) -> Result<(), NoSuchRank> {
        self.engine.fault(fault, Some(rank)).await
    }

    /// Waits until the engine has ended; true when the fault `die` ended it.
    pub async fn ended(&self) -> bool {
        self.tasks.wait().await;
        self.engine.has_died()
    }

    /// Cuts all connections and waits until the last task has ended.
    pub async fn stop(&self) {
        self.engine.stop.cancel();
        self.tasks.wait().await;
    }
}

/// Where one rank's events go.
enum Outlet {
    Sockets(Box<Publisher>),
    Queue(Filler),
}

impl Outlet {
    /// Event sockets, and where they are.
    async fn published(
        config: &SimConfig,
        topic: String,
        published: &[Arc<Published>],
    ) -> Result<Vec<(Self, Sources)>, zeromq::ZmqError> {
        let replay_topic = config.engine_kind == EngineKind::Vllm || config.rules().replay_topic;
        let options = Options { topic: topic.clone(), replay_topic, buffer_steps: config.buffer_steps, rank: 0 };
        let ports = (config.events_port, config.replay_port);
        let publishers = Publisher::bind_ranks(&config.host, ports, &options, published).await?;
        let outlet = |publisher: Publisher| {
            let (events, replay) = (publisher.events_endpoint.clone(), publisher.replay_endpoint.clone());
            let sources = Sources { events, replay, topic: topic.clone() };
            (Self::Sockets(Box::new(publisher)), sources)
        };
        Ok(publishers.into_iter().map(outlet).collect())
    }

    /// One queue for all ranks, and no address.
    fn polled(pull: &Arc<Queue>, published: &[Arc<Published>]) -> Vec<(Self, Sources)> {
        let many = published.len() > 1;
        let outlet = |(rank, published): (u32, &Arc<Published>)| {
            let filler = Filler::new(Arc::clone(pull), Arc::clone(published), many.then_some(rank));
            (Self::Queue(filler), Sources::default())
        };
        (0..).zip(published).map(outlet).collect()
    }

    async fn run(self, commands: mpsc::Receiver<Command>) {
        match self {
            Self::Sockets(publisher) => publisher.run(commands).await,
            Self::Queue(filler) => filler.run(commands).await,
        }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.engine.stop.cancel();
    }
}
