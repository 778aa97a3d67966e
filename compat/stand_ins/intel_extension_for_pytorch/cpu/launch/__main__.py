from intel_extension_for_pytorch.cpu.launch import main

main()
