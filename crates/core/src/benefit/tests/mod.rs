//! The estimator against a simulated training job, whose truth is known by changing the simulation.

mod cases;
mod loader;
mod properties;
mod traces;
