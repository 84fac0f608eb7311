//! Seeds of randomised tests: a new one for each run, printed with a failure so that the run can be repeated.

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

/// Returns the seed of this test, `FLETCH_TEST_SEED` or a random one, and prints it.
///
/// The test runner shows the output of a failed test.
///
/// # Panics
/// If `FLETCH_TEST_SEED` is not a number below 2^64.
#[must_use]
pub fn seed() -> u64 {
    let seed = match std::env::var("FLETCH_TEST_SEED") {
        Ok(text) => text.trim().parse().expect("FLETCH_TEST_SEED is a number below 2^64"),
        Err(_) => rand::random(),
    };
    println!("to repeat: FLETCH_TEST_SEED={seed}");
    seed
}

/// Returns a generator that gives the same numbers for the same seed on every machine.
#[must_use]
pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Returns a standard normal number, made from two uniform ones (Box and Muller, 1958).
pub(crate) fn normal(rng: &mut ChaCha8Rng) -> f64 {
    use rand::Rng as _;
    let (u, v): (f64, f64) = (rng.random_range(f64::MIN_POSITIVE..1.0), rng.random());
    (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}
