//! A vLLM-shaped engine without a model, for tests and the demo.
//!
//! True block accounting by vLLM's own rules (hashes, hits, eviction, events), true prompts (template, tokenizer,
//! placeholder expansion, image identity), made-up text, and time by a simple model. **Invariant:** imports no Fovea
//! crate, so that what both sides agree on has been worked out twice.

pub mod blocks;
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

pub use config::{ConfigError, SimConfig};
pub use engine::State;
pub use fault::Fault;

use engine::{Engine, Sources};
use publisher::{Options, Published, Publisher};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

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
    /// Address of the event socket, `tcp://…`.
    pub events: String,
    /// Address of the replay socket, `tcp://…`.
    pub replay: String,
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
        let model = Arc::new(prompt::Model::load(&config.model_dir)?);
        let listener = TcpListener::bind((config.host.as_str(), config.port)).await.map_err(StartError::Bind)?;
        let http = listener.local_addr().map_err(StartError::Bind)?;
        let topic = config.topic.clone().unwrap_or_else(|| format!("kv@{http}@{}", config.model_name));
        let options = Options { topic: topic.clone(), form: config.hash_form, buffer_steps: config.buffer_steps };
        let published = Arc::new(Published::default());
        let ports = (config.events_port, config.replay_port);
        let publisher = Publisher::bind(&config.host, ports, options, Arc::clone(&published)).await;
        let publisher = publisher.map_err(StartError::BindEvents)?;
        let (events, replay) = (publisher.events_endpoint.clone(), publisher.replay_endpoint.clone());
        let (commands, inbox) = mpsc::channel(COMMANDS_MAX);
        let sources = Sources { events: events.clone(), replay: replay.clone(), topic };
        let engine = Arc::new(Engine::new(config, model, published, commands, sources));
        let tasks = TaskTracker::new();
        tasks.spawn(Arc::clone(&engine).run());
        tasks.spawn(http::serve(listener, Arc::clone(&engine)));
        tasks.spawn(engine.stop.clone().run_until_cancelled_owned(publisher.run(inbox)));
        tasks.close();
        Ok(Self { http, events, replay, engine, tasks })
    }

    /// The state at this moment.
    pub fn state(&self) -> State {
        self.engine.state()
    }

    /// Waits until the state is as asked and returns it.
    pub async fn wait_for(&self, reached: impl Fn(&State) -> bool) -> State {
        self.engine.wait_for(reached).await
    }

    /// Switches a fault on.
    pub async fn fault(&self, fault: Fault) {
        self.engine.fault(fault).await;
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

impl Drop for Sim {
    fn drop(&mut self) {
        self.engine.stop.cancel();
    }
}
