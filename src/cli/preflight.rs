//! The `preflight` command: compares the settings of pods in a file with what this agent does.

use std::fs::File;
use std::io::{self, Read};

use clap::Args;

use crate::lifecycle::BoxError;

/// Ten thousand pods have about 150 MB.
const MAX_BYTES: u64 = 1 << 30;

#[derive(Args, Clone, Debug)]
pub struct PreflightFlags {
    /// File of pods or their templates as YAML or JSON, such as kubectl get pods -A -o yaml prints them; - is
    /// standard input.
    #[arg(default_value = "-")]
    pub file: String,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
}

impl PreflightFlags {
    /// The text of the file.
    pub fn read(&self) -> Result<String, BoxError> {
        let named = |error: io::Error| format!("cannot read {:?}: {error}", self.file);
        let source: Box<dyn Read> = match self.file.as_str() {
            "-" => Box::new(io::stdin()),
            path => Box::new(File::open(path).map_err(named)?),
        };
        let mut text = String::new();
        let length = source.take(MAX_BYTES).read_to_string(&mut text);
        if length.map_err(named)? as u64 == MAX_BYTES {
            return Err(format!("{:?} has {MAX_BYTES} bytes or more", self.file).into());
        }
        Ok(text)
    }
}
