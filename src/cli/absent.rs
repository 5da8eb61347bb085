//! Commands of pilot-agent that are missing here. They accept any arguments, so that the error says what
//! to use instead.

use clap::Args;

#[derive(Args, Clone, Debug)]
pub struct Words {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    ignored: Vec<String>,
}

pub const COLLATERAL: &str = "this build is not compiled with collateral support";
