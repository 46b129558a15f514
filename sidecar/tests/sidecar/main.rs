//! The whole sidecar in this process, between a simulated or scripted engine and a balancer's end of the block stream.

#[cfg(test)]
mod balancer;
#[cfg(test)]
mod blocks;
#[cfg(test)]
mod engine;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod rig;
