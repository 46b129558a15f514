//! The balancer's decisions: which worker holds what, who is alive, how busy each is, and who gets a request.
//!
//! Pure: time comes in as an argument; locks, sockets and random numbers live in the shell.

pub mod choose;
pub mod diagnosis;
pub mod embeddings;
pub mod fleet;
pub mod health;
pub mod history;
pub mod index;
pub mod load;
pub mod quarantine;
pub mod queue;
pub mod speculation;
pub mod tenants;
