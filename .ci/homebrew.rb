# Written by `make release` from .ci/homebrew.rb, for a tap. Untried until a version is published.
class MlxBackend < Formula
  include Language::Python::Virtualenv

  desc "Server and chat for reasoning models on Apple's MLX"
  homepage "{source}"
  url "{source}/releases/download/v{version}/{sdist}"
  sha256 "{sha256}"
  license all_of: ["MIT", "CC-BY-SA-4.0"]

  depends_on arch: :arm64
  depends_on macos: :sonoma
  depends_on "python@3.12"

  def install
    # MLX is published as wheels only, so pip installs what is required, within the bounds that the package states.
    virtualenv_create(libexec, "python3.12", without_pip: false)
    system libexec/"bin/python", "-m", "pip", "install", buildpath
    bin.install_symlink libexec/"bin/mlx-backend"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlx-backend --version")
  end
end
