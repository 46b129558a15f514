//! Ordered end: the first SIGTERM or SIGINT asks every task to stop, the second ends the wait for them.

use std::io;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The program's stop token and the tasks that must end before it does. Clones share both.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    stop: CancellationToken,
    hurry: CancellationToken,
    tasks: TaskTracker,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drained {
    /// Every task ended.
    Idle,
    /// The cap was reached, or a second signal came, with this many tasks still there.
    Cut { tasks: usize },
}

impl Shutdown {
    /// Without signals: only [`Shutdown::request`] stops it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops at SIGTERM or SIGINT. To be called in a runtime.
    ///
    /// # Errors
    /// When the signal handlers cannot be set.
    pub fn on_signals() -> io::Result<Self> {
        let shutdown = Self::new();
        let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        tokio::spawn(listen(terminate, interrupt, shutdown.stop.clone(), shutdown.hurry.clone()));
        Ok(shutdown)
    }

    /// Cancelled when the program must stop.
    pub fn token(&self) -> CancellationToken {
        self.stop.clone()
    }

    /// Asks everything to stop, as a signal does.
    pub fn request(&self) {
        self.stop.cancel();
    }

    /// Ends when a stop is asked for.
    pub async fn requested(&self) {
        self.stop.cancelled().await;
    }

    /// Starts a task that the drain waits for.
    pub fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tasks.spawn(task)
    }

    /// Tasks that have not ended.
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    /// Waits until all tasks have ended, for `cap` at most or until a second signal.
    pub async fn drain(&self, cap: Duration) -> Drained {
        self.tasks.close();
        tokio::select! {
            () = self.tasks.wait() => Drained::Idle,
            () = self.hurry.cancelled() => Drained::Cut { tasks: self.tasks.len() },
            () = tokio::time::sleep(cap) => Drained::Cut { tasks: self.tasks.len() },
        }
    }
}

async fn listen(mut terminate: Signal, mut interrupt: Signal, stop: CancellationToken, hurry: CancellationToken) {
    for (token, text) in [(stop, "stopping"), (hurry, "asked twice, stopping at once")] {
        let name = tokio::select! { _ = terminate.recv() => "SIGTERM", _ = interrupt.recv() => "SIGINT" };
        tracing::info!(signal = name, "{text}");
        token.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, id};

    use super::*;

    fn kill(signal: &str) {
        assert!(Command::new("kill").args([signal, &id().to_string()]).status().unwrap().success());
    }

    #[tokio::test]
    async fn the_first_signal_stops_and_the_second_cuts_the_drain() {
        let shutdown = Shutdown::on_signals().unwrap();
        shutdown.spawn(std::future::pending::<()>());
        kill("-TERM");
        shutdown.requested().await;
        kill("-INT");
        assert_eq!(shutdown.drain(Duration::from_secs(600)).await, Drained::Cut { tasks: 1 });
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_when_idle_or_at_the_cap() {
        let shutdown = Shutdown::new();
        let token = shutdown.token();
        shutdown.spawn(async move { token.cancelled().await });
        assert_eq!(shutdown.drain(Duration::from_secs(9)).await, Drained::Cut { tasks: 1 });
        shutdown.request();
        assert_eq!(shutdown.drain(Duration::from_secs(9)).await, Drained::Idle);
        assert_eq!(shutdown.tasks(), 0);
    }
}
